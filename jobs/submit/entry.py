"""The file that `headwater submit-command` gives to spark-submit: the command line of headwater."""

import os
import sys

if __name__ == "__main__":
    sys.path[0] = os.getcwd()  # not this directory, whose modules must not be imported

    from jobs.cli import main

    main()
