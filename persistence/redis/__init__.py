"""States in Redis or Valkey. `persistence.redis.layout` says under which names, `open_store` how to reach it."""

from persistence.redis.preflight import preflight
from persistence.redis.settings import RISKS
from persistence.redis.store import RedisStore, open_store

__all__ = ["RISKS", "RedisStore", "open_store", "preflight"]
