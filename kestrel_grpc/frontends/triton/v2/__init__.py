"""Holds the messages of `proto/compat/inference`, generated into a descriptor pool of their own."""
