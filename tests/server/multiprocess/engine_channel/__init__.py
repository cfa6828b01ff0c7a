"""Tests of `kestrel_grpc.multiprocess.engine_channel`."""
