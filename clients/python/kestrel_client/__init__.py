"""A thin client of the Kestrel gRPC vision-language server."""
