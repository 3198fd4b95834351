"""Hold what the user brings: a model, how it is called, its layers and parameters, and the data."""
