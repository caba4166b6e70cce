"""The ``fedpcd`` command: runs the app, compares finished runs, lists the methods."""
