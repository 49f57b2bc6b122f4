"""The streams between neighbouring stages: activations one way, gradients the other."""
