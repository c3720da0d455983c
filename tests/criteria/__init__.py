"""Ready-made halting criteria: what they decide, where they run, how they are saved."""
