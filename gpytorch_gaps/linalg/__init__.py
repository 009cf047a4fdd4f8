"""Kronecker algebra as plain tensor functions: products, eigen-decompositions, masked Gram matrices."""
