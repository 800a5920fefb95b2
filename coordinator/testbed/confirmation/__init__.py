"""The simulator beside real servers: the same rules, the same sleeps, and what comes of both.

sleeps ------------------------> real steps ----> real figures -----.
   |       one worker: overheads    |                               +--> a table, and why where they differ
   '---------------'-----------> simulated steps -> simulated figures
"""
