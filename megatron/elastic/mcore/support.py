"""placeholder"""
def check(args, platform):
    return []
