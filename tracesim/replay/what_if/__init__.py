"""Changes to a rebuilt run, one function each, and the list of them."""
