"""One package per API that the server offers."""
