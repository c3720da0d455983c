"""How layers of attention skip halted tokens: queries, output projection and MLP of active tokens only.

rows            gated layers of an adaptive block, differentiable
layers          layers of a pretrained network, called one by one by the network that owns them
packed_layer    a layer's weights as they are computed with, and its three parts
linear          linear layers by oneDNN
panels          linear layers, and what follows attention in a layer, for few rows: attend_products.hpp
norms           norms, and the sums before them: attend_norms.hpp
ragged          which tokens are computed, and what each attends to
native          attention of ragged rows by a kernel in C++: attend.cpp
rectangles      the same by torch, in groups
"""
