"""The strategies by name, and the baselines among them. `dssra` itself is in `collapipe.allocation.search`.

`decide` finds a strategy by its name. Each baseline module only places units on hosts; `complete_plan` then
adds windows, shares, powers and codecs by the same rules for all baselines.
"""
