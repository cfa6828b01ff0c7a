"""Reads the headers and the structure of image files before anything is decoded: one module per format.

Knows file formats and their limits; knows no pixels, tensors, models or requests.
"""
