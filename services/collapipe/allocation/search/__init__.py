"""The search for the best decision of a round: DSSRA.

`dssra` takes turns between two solvers. `place_segments` finds segments, order, micro-batches, windows and
codecs for given shares and powers of all possible links. `allocate` finds the best shares and powers for the
links of one plan.

Read `dssra` first. Then follow one of the two solvers:

- `segments` is the entry point. `link_tables` and `segment_costs` say what every choice costs, and `search_tables` has
  that for compiled functions. Partial plans are `labels`, and `segment_bounds` has their lower bounds.
  `pareto_front` finds the plans of one cluster, `joint_clusters` takes one plan for each cluster, and `joint_search`
  does both. `infeasible` says why there is no plan;
- `shared_links` (the objective as a function of transfer times), `bandwidth` (the convex problem), `power`.

`assumed_links` and `local_changes` connect the two.
"""
