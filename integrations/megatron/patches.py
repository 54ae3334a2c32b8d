"""Replace symbols of other libraries, and put them back."""

from typing import Any

_MISSING = object()


class Patches:
    """The symbols that were replaced, in order, and what they were."""

    def __init__(self) -> None:
        self._saved: list[tuple[Any, str, Any, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace or create `owner.name`, and remember what to restore."""
        self._saved.append((owner, name, vars(owner).get(name, _MISSING), value))
        setattr(owner, name, value)

    def restore(self) -> None:
        """Undo all replacements, the newest first, except those that somebody else has replaced since."""
        while self._saved:
            owner, name, value, ours = self._saved.pop()
            if vars(owner).get(name, _MISSING) is not ours:
                continue
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
