"""How layers of attention skip halted tokens: queries, output projection and MLP of active tokens only."""
