"""The proof: real flights, republished and aggregated with crashes on purpose, compared with the plain truth."""
