"""The shaper process. It runs beside a host, and gives the links of the host the conditions in links.json.

`links_file` and `traces` read the description, `link_emulator` gives it to the kernel, and `status` reports
the result.
"""
