"""How the weights of linear layers, heads and embeddings are held and multiplied: each scheme is a file."""
