"""The simulator beside real servers: the same rules, the same times, and what comes of both.

sleeps --> real steps --+--> what the rule counted --> real figures -----------.
                        |                                                      +--> a table, and why not
                        '--> what each part took ----> simulated figures ------'
"""
