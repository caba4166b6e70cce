"""Hides from a process what its image would not hold: the test's environment has more installed."""

import os
import sys

HIDDEN = frozenset(os.environ.get("FEDPCD_NOT_IN_IMAGE", "").split(","))


class _Finder:
    """A finder that does not find hidden modules; saying so beforehand would raise, where others ask and go without."""

    def __init__(self, finder):
        self._finder = finder

    def __getattr__(self, name):
        return getattr(self._finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else self._finder.find_spec(name, path, target)


sys.meta_path[:] = map(_Finder, sys.meta_path)
