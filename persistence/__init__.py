"""What a stage has folded, kept by a store: protocols, state records, stores and the order of the commit."""
