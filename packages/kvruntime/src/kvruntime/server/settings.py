"""What a server is told when it starts, and the rules of these values. Knows nothing that runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from kvruntime.errors import InvalidRequest

__all__ = ["ServerSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """The settings of a server.

    Args:
        model_names: what clients may call the model; answers use the first.
        api_keys: the keys that are accepted, each with the tenant it belongs to. Tenants share no
            cached blocks; the keys of tenant None share theirs. Without keys, none is asked for.
        allowed_hosts: the names in the header `Host` that are answered, without ports; none: all are.
        max_body_bytes: the longest body of a request.
        body_seconds: how long a client may take to send it.
        request_seconds: how long a request may take until it is aborted; None lets it run.
        max_num_open: how many requests may be open; what probes and Prometheus ask is always
            answered.
    """

    model_names: tuple[str, ...] = ("kvruntime",)
    api_keys: Mapping[str, str | None] = field(
        default_factory=lambda: MappingProxyType({}), repr=False
    )
    allowed_hosts: tuple[str, ...] = ()
    max_body_bytes: int = 4 * 2**20
    body_seconds: float = 30.0
    request_seconds: float | None = 600.0
    max_num_open: int = 1000

    def __post_init__(self) -> None:
        if not self.model_names or not all(self.model_names):
            raise InvalidRequest(f"a model must have a name, got {self.model_names!r}")
        if not all(key and key.isascii() and key.isprintable() for key in self.api_keys):
            raise InvalidRequest("an API key must be printable ASCII and not empty")
        for name in ("max_body_bytes", "body_seconds", "request_seconds", "max_num_open"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidRequest(f"{name} must be above 0, got {value}")
