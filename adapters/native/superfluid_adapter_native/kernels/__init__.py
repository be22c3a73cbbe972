"""Products, attention and row-wise functions over quantised weights, compiled when first wanted."""
