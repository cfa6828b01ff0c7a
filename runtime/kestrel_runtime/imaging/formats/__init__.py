"""What image files declare about themselves, read before anything is decoded: one module per format.

Knows file formats and their limits; knows no pixels, tensors, models or requests.
"""
