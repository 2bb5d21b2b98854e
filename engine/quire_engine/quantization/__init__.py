"""How the weights of linear layers, heads and embeddings are stored and multiplied: one file per scheme."""
