"""Where models come from: a path, the built-in shelf, a hub; pulling and keeping them."""
