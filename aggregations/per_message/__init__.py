"""The path of one message at a time: the definition that the vectorised path must equal."""
