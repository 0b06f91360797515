"""dlmgrid: is a decoding method for diffusion language models really faster, and really lossless?

One import namespace over the repository's four folders; imports point one way:
``jobs -> cluster -> workers -> kernels``.
"""

__version__ = "0.1.0"
