"""States in Redis or Valkey. `persistence.redis.layout` documents the names of the keys, `open_store` the URLs."""

from persistence.redis.preflight import preflight
from persistence.redis.settings import RISKS
from persistence.redis.store import RedisStore, open_store

__all__ = ["RISKS", "RedisStore", "open_store", "preflight"]
