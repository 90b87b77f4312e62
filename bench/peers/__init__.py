"""Other libraries that move KV, measured like ours: two processes, the same layouts and block tables, real bytes compared.

They run through their public Python API, in an interpreter that has them (`pip install .[peers]`). Nothing here is imported by
the product.
"""
