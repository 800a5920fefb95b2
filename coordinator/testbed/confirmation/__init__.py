"""The simulator compared with real servers, with the same rules and the same times.

sleeps --> real steps --+--> what the rule counted --> real figures -----------.
                        |                                                      +--> a table, and why not
                        '--> what each part took ----> simulated figures ------'
"""
