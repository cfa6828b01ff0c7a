"""What an answer must look like: the value that requests have, and the bounds that it keeps."""
