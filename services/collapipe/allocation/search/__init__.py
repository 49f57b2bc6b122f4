"""The search for the best decision of a round: DSSRA.

`dssra` takes turns between two solvers. `place_segments` finds segments, order, micro-batches, windows and
codecs for given shares and powers of all possible links. `allocate` finds the best shares and powers for the
links of one plan.

Read `dssra` first. Then follow one of the two solvers:

- `segments` (the entry point), `link_tables` and `segment_costs` (what every choice costs), `labels` (partial
  plans), `segment_bounds` and `segment_windows` (lower bounds), `pareto_front` (the plans of one cluster),
  `joint_clusters` (one plan for each cluster), `joint_search` (both together), `infeasible` (why there is no plan);
- `shared_links` (the objective as a function of transfer times), `bandwidth` (the convex problem), `power`.

`assumed_links` and `local_changes` connect the two.
"""
