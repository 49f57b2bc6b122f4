"""The shaper process. It runs beside a host, and gives the links of the host the conditions in links.json."""
