"""A preallocated key/value cache: what earlier tokens projected to, kept so that it is not computed again.

The caller advances it: every layer writes the same new positions, and only when all have does `advance` make
them past. So a step that fails half-way leaves the cache as it was. It refuses to outgrow its capacity.

Shape legend: B batch, G key/value heads, T new positions, S positions up to and with the new ones,
D key width, E value width.
"""

from __future__ import annotations

from typing import Any

from regardant.problem import FLOATS, integer, kind


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
            TypeError: a size that is no integer; `like` that is no array, or one of integers.
            ValueError: a size below 1 (layers, kv_heads, widths) or below 0 (batch, capacity).
        """
        sizes = {
            "layers": (layers, 1),
            "batch": (batch, 0),
            "kv_heads": (kv_heads, 1),
            "capacity": (capacity, 0),
            "key_width": (key_width, 1),
            "value_width": (key_width if value_width is None else value_width, 1),
        }
        *shape, D, E = (integer("KVCache", name, size, low=low) for name, (size, low) in sizes.items())
        xp = _namespace(like)
        if str(like.dtype).removeprefix("torch.") not in FLOATS:
            raise TypeError(f"KVCache: like must be an array of {', '.join(FLOATS)}; got {_what(like)}")
        self.capacity = shape[-1]
        self.length = 0
        self._k_LBGSD = xp.zeros((*shape, D), dtype=like.dtype, device=like.device)
        self._v_LBGSE = xp.zeros((*shape, E), dtype=like.dtype, device=like.device)

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
            TypeError: keys or values that are no arrays of the cache's kind and type, a layer that is no integer.
            ValueError: no room for T more positions, shapes other than the cache's, or a layer that is not there.
        """
        layer = integer("KVCache", "layer", layer, low=0, high=self._k_LBGSD.shape[0] - 1)
        kept = {"k": self._k_LBGSD, "v": self._v_LBGSE}
        given = {"k": k_BGTD, "v": v_BGTE}
        for name, new in given.items():
            if not isinstance(new, type(kept[name])) or new.dtype != kept[name].dtype:
                raise TypeError(
                    f"KVCache: {name} must be {_what(kept[name])} as the cache is; got {_what(new)}"
                )
        T = k_BGTD.shape[2] if k_BGTD.ndim == 4 else 1
        for name, new in given.items():
            want = (*kept[name].shape[1:3], T, kept[name].shape[-1])
            if tuple(new.shape) != want:
                raise ValueError(f"KVCache: {name} must be {want}; got {tuple(new.shape)}")
        end = self.length + T
        if end > self.capacity:
            raise ValueError(f"KVCache: capacity must hold {end} positions; it was made for {self.capacity}")
        self._k_LBGSD[layer, :, :, self.length : end] = k_BGTD
        self._v_LBGSE[layer, :, :, self.length : end] = v_BGTE
        return self._k_LBGSD[layer, :, :, :end], self._v_LBGSE[layer, :, :, :end]

    def advance(self, count: int) -> None:
        """Make the `count` positions that every layer has written part of the past.

        Raises:
            ValueError: a negative count, or more than the capacity holds.
        """
        free = self.capacity - self.length
        count = integer("KVCache", "count", count)
        if not 0 <= count <= free:
            raise ValueError(f"KVCache: count must lie between 0 and the {free} free positions; got {count}")
        self.length += count

    def truncate(self, length: int) -> None:
        """Forget everything from position `length` on.

        Raises:
            ValueError: a length that is negative or longer than what is there.
        """
        length = integer("KVCache", "length", length)
        if not 0 <= length <= self.length:
            raise ValueError(f"KVCache: length must lie between 0 and {self.length}; got {length}")
        self.length = length


def _namespace(array: Any) -> Any:
    """The array's own namespace; torch tensors, which name none, get theirs from array-api-compat.

    Raises:
        TypeError: it has none.
    """
    try:
        return array.__array_namespace__()
    except AttributeError:
        from array_api_compat import array_namespace, is_array_api_obj

        if not is_array_api_obj(array):
            raise TypeError(f"KVCache: like must be an array; got {kind(array)}") from None
        return array_namespace(array)


def _what(given: Any) -> str:
    """What kind of thing was given, an array by its element type."""
    name = f"{type(given).__module__}.{type(given).__qualname__}"
    dtype = getattr(given, "dtype", None)
    return name if dtype is None else f"{name} of {dtype}"
