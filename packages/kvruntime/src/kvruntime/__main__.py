"""`python -m kvruntime` is `kvruntime`."""

from kvruntime.cli import main

if __name__ == "__main__":
    main()
