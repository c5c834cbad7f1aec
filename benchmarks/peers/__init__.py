"""The systems that are compared, each in processes of its own."""
