"""The one place that holds the version: the package and its metadata read it from here."""

__version__ = "0.1.0"
