"""The shaper process, which stands beside a host and gives the host's links the conditions that links.json describes.

`links_file` and `traces` read the description, `link_emulator` gives it to the kernel, and `status` reports the result.
"""
