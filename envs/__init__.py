"""What is the task, what do tools do, where do they run, and what is the reward?"""
