"""The same forty requests through every frontend, compared with the table of errors that docs/errors.md shows."""
