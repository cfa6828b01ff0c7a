"""Commands for those who change this code: generators of pages and of code, and reports on structure and tests."""
