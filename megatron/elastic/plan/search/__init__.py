"""The graph axis: shapes of pipelines, their bounds, and the search for the best one."""
