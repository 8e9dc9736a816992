"""Looking up a registered policy or predictor by name, with errors that name the nearest known ones."""

import difflib


def find(kind, plural, base, registered, value, parameters):
    """Returns the instance meant by `value`: a registered name or a class (built with `parameters`), or an instance.

    Args:
        kind, plural: what the things are called in errors, such as "policy" and "policies".
        base: the class that they all derive from.
        registered: name -> class or instance.
        value: a name, a subclass of `base`, or an instance of it.
        parameters: dict of arguments for a class.

    Raises ValueError for an unknown name and TypeError for other objects, or for parameters beside an instance.
    """
    if isinstance(value, str):
        if value not in registered:
            near = difflib.get_close_matches(value.lower(), registered, n=2, cutoff=0.5)
            hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise ValueError(f"{kind}: unknown name {value!r}.{hint} Known {plural}: {', '.join(sorted(registered))}")
        value = registered[value]
    if isinstance(value, type) and issubclass(value, base):
        return value(**parameters)
    if not isinstance(value, base):
        raise TypeError(f"{kind}: expected a name, a {base.__name__} subclass or instance, got {value!r}")
    if parameters:
        raise TypeError(f"{kind} {value.name!r} is already built; parameters {sorted(parameters)} would have no effect")
    return value
