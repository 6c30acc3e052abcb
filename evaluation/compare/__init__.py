"""`job=compare`: any number of runs and evaluations in one page, one table and one CSV file.

| module | what it holds |
|---|---|
| `finding` | runs and evaluations below the folders that a user names |
| `metrics` | the curves of a run's `metrics.csv`, whether it has finished or not |
| `measured` | the results of `job=evaluate` in a run's folder |
| `reading` | a run: settings, summary, curves, results, state |
| `groups` | runs that differ by their seed alone, and the settings that differ between such groups |
| `comparison` | the order of the groups, the baseline, and differences to it with their noise |
| `tables`, `pictures` | what is shown, as plain tables and as figures |
| `page` | the HTML page, which needs no network, by `page.html.jinja` |
| `job` | from settings to files |
"""
