"""CollaPipe: Transformers trained collaboratively on devices too small to hold them."""
