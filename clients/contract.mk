# What the Makefiles of the examples share: the files of the contract, and those of the details of errors.

PROTO := ../../proto
FILES := $(wildcard $(PROTO)/kestrel/v1/*.proto)
# Where google/rpc/error_details.proto is: a checkout of googleapis, or the Python package googleapis-common-protos.
GOOGLEAPIS ?= $(shell python3 -c 'import google.rpc as rpc, pathlib; print(pathlib.Path(*rpc.__path__).parents[1])')
