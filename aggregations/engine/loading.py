"""Loads the compiled code that reads messages, or has it compiled, before it is needed."""


def load_reading() -> None:
    """Load what reads messages, envelopes and payloads; `aggregations.columns.prepare` is the same for states."""
    import aggregations.columns.envelope_reading
    import aggregations.columns.gather
    import aggregations.columns.payload_reading
    import aggregations.engine.message_kernels  # noqa: F401
