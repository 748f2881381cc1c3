"""A preallocated key/value cache: what earlier tokens projected to, kept so that it is not computed again.

The caller advances it: every layer writes the same new positions, and only when all have does `advance` make
them past. So a step that fails half-way leaves the cache as it was. It refuses to outgrow its capacity.

Shape legend: B batch, G key/value heads, T new positions, S positions up to and with the new ones,
D key width, E value width.
"""

from __future__ import annotations

from typing import Any


class KVCache:
    """Keys and values of all layers, for NumPy arrays or any others with an array-API namespace.

    Memory: layers · batch · kv_heads · capacity · (key_width + value_width) numbers, taken at once.
    """

    def __init__(
        self,
        layers: int,
        batch: int,
        kv_heads: int,
        capacity: int,
        key_width: int,
        value_width: int | None = None,
        *,
        like: Any,
    ) -> None:
        """Make room for `capacity` positions in arrays like `like` (its namespace, dtype and device).

        Raises:
            ValueError: a size below 1 (layers, kv_heads, widths) or below 0 (batch, capacity).
        """
        value_width = key_width if value_width is None else value_width
        least = {"layers": 1, "batch": 0, "kv_heads": 1, "capacity": 0, "key_width": 1, "value_width": 1}
        sizes = {
            "layers": layers,
            "batch": batch,
            "kv_heads": kv_heads,
            "capacity": capacity,
            "key_width": key_width,
            "value_width": value_width,
        }
        for name, size in sizes.items():
            if size < least[name]:
                raise ValueError(f"KVCache: {name} must be at least {least[name]}; got {size}")
        self.capacity = capacity
        self.length = 0
        xp = _namespace(like)
        shape = (layers, batch, kv_heads, capacity)
        self._k_LBGSD = xp.zeros((*shape, key_width), dtype=like.dtype, device=like.device)
        self._v_LBGSE = xp.zeros((*shape, value_width), dtype=like.dtype, device=like.device)

    def __repr__(self) -> str:
        layers, batch, kv_heads, capacity, width = self._k_LBGSD.shape
        return f"KVCache({layers=}, {batch=}, {kv_heads=}, {capacity=}, {width=}, length={self.length})"

    def write(self, layer: int, k_BGTD: Any, v_BGTE: Any) -> tuple[Any, Any]:
        """Put a layer's new keys and values behind the past, without advancing.

        Args:
            layer: which layer.
            k_BGTD: new keys. `v_BGTE`: new values.

        Returns:
            Views (B, G, S, D) and (B, G, S, E) of everything up to and with the new positions, S = length + T.

        Raises:
            ValueError: no room for T more positions, or shapes other than the cache's.
        """
        end = self.length + k_BGTD.shape[2]
        if end > self.capacity:
            raise ValueError(f"KVCache: capacity must hold {end} positions; it was made for {self.capacity}")
        for name, new, kept in (("k", k_BGTD, self._k_LBGSD), ("v", v_BGTE, self._v_LBGSE)):
            want = (*kept.shape[1:3], k_BGTD.shape[2], kept.shape[-1])
            if tuple(new.shape) != want:
                raise ValueError(f"KVCache: {name} must be {want}; got {tuple(new.shape)}")
        self._k_LBGSD[layer, :, :, self.length : end] = k_BGTD
        self._v_LBGSE[layer, :, :, self.length : end] = v_BGTE
        return self._k_LBGSD[layer, :, :, :end], self._v_LBGSE[layer, :, :, :end]

    def advance(self, count: int) -> None:
        """Make the `count` positions that every layer has written part of the past.

        Raises:
            ValueError: a negative count, or more than the capacity holds.
        """
        if count < 0 or self.length + count > self.capacity:
            free = self.capacity - self.length
            raise ValueError(f"KVCache: count must lie between 0 and the {free} free positions; got {count}")
        self.length += count

    def truncate(self, length: int) -> None:
        """Forget everything from position `length` on.

        Raises:
            ValueError: a length that is negative or longer than what is there.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"KVCache: length must lie between 0 and {self.length}; got {length}")
        self.length = length


def _namespace(array: Any) -> Any:
    """The array's own namespace; torch tensors, which name none, get theirs from array-api-compat."""
    try:
        return array.__array_namespace__()
    except AttributeError:
        from array_api_compat import array_namespace

        return array_namespace(array)
