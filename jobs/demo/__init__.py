"""The demo: real flights are republished and aggregated with injected crashes, and every result is checked."""
