"""Keys and values of a pass into a layer's caches; the torch twin is ``kernels.attention.write_cache``."""
